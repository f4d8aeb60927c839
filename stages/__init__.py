"""The pipeline's stages, one file each, and what they are built of."""
