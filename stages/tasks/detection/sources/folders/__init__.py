"""Folders of pictures with boxes, in the forms that annotation tools write."""
