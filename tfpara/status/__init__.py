"""The live page of a run: its processes, their progress and speed, and which ones are awaited."""
