"""What this machine and this process offer: cores, memory, folders, locks, signals."""
