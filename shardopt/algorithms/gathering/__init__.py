"""Parts of sharded parameters that are worked on whole, each by one owner."""
