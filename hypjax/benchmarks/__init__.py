"""What this machine makes of hypjax, beside its peers."""
