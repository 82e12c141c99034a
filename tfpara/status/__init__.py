"""The live page of a run: who is there, how far, how fast, and who waits for whom."""
