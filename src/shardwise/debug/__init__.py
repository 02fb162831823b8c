"""Looking at what happens."""
