"""A run's numbers: the log on disk, and curves of one run or of several. `python -m hfppo.reporting` draws them."""
