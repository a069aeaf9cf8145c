"""What a run was made of: its settings, the files that it reads, and the software that played it.

A folder records it when its run begins. A resume compares: what has changed is refused by name, or
honoured and recorded by name where the rounds that are left can follow it. So does what trains
beside a finished run, but it records nothing there.
"""
