"""What a command is doing: its phases with their seconds and forward passes, and the lines that say so.

It gives `Meter`, `Work`, `current`, `metered`, `watch`, `tracked`, `StatusLine` and `showing`, and imports no heavy
library. May import nothing else.
"""
