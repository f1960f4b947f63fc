"""What a run leaves on disk and on the Hub: checkpoints that are whole or not there, and how it goes on from them."""
