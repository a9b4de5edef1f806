"""The two tiers and who owns what: home (complete KV in host memory), frames (device slots of rows), their tables."""
