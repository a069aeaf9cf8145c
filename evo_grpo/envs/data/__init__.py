"""Reads rows from files, data frames and datasets."""
