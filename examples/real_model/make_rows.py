"""Writes train.jsonl and test.jsonl: sums and differences of numbers from 1 to 9."""

import json
import random
from pathlib import Path


def rows(count: int, draw: random.Random) -> list[dict[str, str]]:
    """Return so many questions with their answers."""
    found: list[dict[str, str]] = []
    for _ in range(count):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        sign = draw.choice("+-")
        answer = a + b if sign == "+" else a - b
        found.append({"question": f"{a} {sign} {b} =", "answer": str(answer)})
    return found


def main(folder: Path) -> None:
    """Write both files into a folder."""
    draw = random.Random(7)
    for name, count in (("train", 400), ("test", 128)):
        lines = map(json.dumps, rows(count, draw))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main(Path(__file__).parent)
