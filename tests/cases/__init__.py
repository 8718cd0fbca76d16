"""Small modules of our own for every way in which half precision breaks, and for what only looks like it."""
