"""What a run has on disk, how each file is read back, and the words for its result."""
