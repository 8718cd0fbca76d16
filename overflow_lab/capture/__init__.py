"""How a subject is run and watched: in each precision, at every module, into a recording."""
