"""Official files, or generated letters, to records."""
