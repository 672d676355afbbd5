"""Starts real servers and real daemons for tests, and reads archives without the archiver's own code."""
