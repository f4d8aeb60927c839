"""A mixture of experts made from dense models of one base: checking, merging, routing, and the certificate."""
