"""Is what lies here what was recorded of it, and does it come out the same again?"""
