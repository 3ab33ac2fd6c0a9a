"""The machine and the process: cores, memory, folders, locks, signals, cloud storage."""
