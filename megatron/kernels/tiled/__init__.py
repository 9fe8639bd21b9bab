"""The output layer of one shard, worked on in tiles of vocabulary rows."""
