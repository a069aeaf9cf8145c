"""Rows from files, frames and datasets."""
