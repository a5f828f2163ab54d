"""Commands beside training. The table of all commands is in shardloom.py."""
