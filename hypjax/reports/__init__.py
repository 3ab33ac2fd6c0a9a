"""What people read: tables of results, published results, and pictures."""
