"""Checks of what users pass, before anything is generated or written."""
