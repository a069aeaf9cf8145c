"""What may happen to a file on a disk, or on its way from somebody else."""


def cut(file):
    file.write_bytes(file.read_bytes()[:-7])


def empty(file):
    file.write_bytes(b"")


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))


def folder_instead(file):
    file.unlink()
    file.mkdir()
