"""The files of a run, how each is read back, and the words for its result."""
