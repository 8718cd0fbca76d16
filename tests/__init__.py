"""The tests; everything here runs on the CPU, offline."""
