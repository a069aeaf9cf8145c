"""Records and compares the inputs of a run: its settings, the files it reads, and the software.

A run folder records the inputs when the run begins. A resume compares them with the present ones:
it refuses a change by name, or records it by name if the remaining rounds can use it. Commands that
train beside a finished run make the same comparison and record nothing.
"""
