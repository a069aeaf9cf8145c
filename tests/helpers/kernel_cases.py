"""Random arguments of the operators of a decode step, and their comparison with torch.

Rows fill no tile, ranks and rows of agents differ, sizes are no powers of two, and what no row may
read is NaN.
"""

from dataclasses import dataclass, field, replace

import kernel_reference
import torch

from evo_grpo.model.llama.cuda import operators

#: Largest difference over the largest number, by dtype; the interpreter cuts bf16 off.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
#: The interpreter sums the 4,096 weights of a block one after another, where a card does in a tree:
#: each addition to a sum near 1 rounds by up to 2 ** -24.
DRAWN_APART = 4096 * 2**-24
NAMES = (
    "embed_norm", "qkv", "attend", "attend_splits", "add_norm", "gate_up", "draw", "head_slopes",
)  # fmt: skip
#: Those of learning, whose tiles are longer.
LEARN_NAMES = (
    "project", "add_low", "outer", "norm_backward", "glu_backward", "qkv_backward", "join_parts",
)  # fmt: skip
#: Kernels whose programs are tiles of rows.
TILED = ("qkv", "gate_up", "project", "add_low", "outer", "qkv_backward", "join_parts")


@dataclass
class Case:
    """Arguments of an operator.

    Attributes:
        name: The operator, or "draw" for both of a draw.
        owners: (B,) agent of each row.
        given: Arguments that are read, by name.
        written: Those that are written, by name.
        rows: Names of those that have a row for each row.
    """

    name: str
    owners: torch.Tensor
    given: dict
    written: dict = field(default_factory=dict)
    rows: tuple = ()

    def run(self, functions=operators):
        """What an operator, or its reference, returns and writes."""
        given, written = dict(self.given), {k: v.clone() for k, v in self.written.items()}
        if self.name == "draw":
            names = ("logits", "temperature", "drawn", "minimum", "ends", "scale", "cap")
            both = given | written
            given["weighed"] = functions.weigh_blocks(*(both[name] for name in names))
            order = ("logits", "weighed", "temperature", "greedy", "draws", "minimum", "limit")
            order += ("ends", "origin", "scale", "cap")
            functions.draw_token(*(given[name] for name in order), *written.values())
            made = ()
        elif self.name == "attend_splits":
            made = functions.join_splits(*functions.attend_splits(*given.values()), given["q"])
            made = (made,)
        else:
            made = getattr(functions, self.name)(*given.values(), *written.values())
            made = () if made is None else made if isinstance(made, tuple) else (made,)
        return [*made, *written.values()]

    def expected(self):
        """What torch computes in float64 from the same numbers."""

        def wide(x):
            if isinstance(x, list):
                return [wide(part) for part in x]
            floats = isinstance(x, torch.Tensor) and x.dtype.is_floating_point
            return x.double() if floats else x

        given = {k: wide(v) for k, v in self.given.items()}
        written = {k: v if self.name == "draw" else wide(v) for k, v in self.written.items()}
        return replace(self, given=given, written=written).run(kernel_reference)

    def check(self):
        """Compare with torch; rows of NaN are those of the reference."""
        floats = [v.dtype for v in (*self.given.values(), *self.written.values()) if is_float(v)]
        dtype = self.written["logits"].dtype if self.name == "head_slopes" else floats[0]
        found, wanted = self.run(), self.expected()
        if self.name == "draw":
            self._exchange_close(found, wanted)
        for place, (one, two) in enumerate(zip(found, wanted, strict=True)):
            if not is_float(one):
                assert torch.equal(one, two), (self.name, place, one, two)
                continue
            assert torch.equal(one.isnan(), two.isnan()), (self.name, place, "NaN")
            two = two.nan_to_num()
            apart = (one.double().nan_to_num() - two).abs().max()
            most = TOLERANCE[dtype] * max(1.0, float(two.abs().max()))
            assert apart <= most, (self.name, place, float(apart), most)

    def _exchange_close(self, found, wanted):
        """Take the reference's row where a draw lies as close to the token that was drawn."""
        tokens, other, given = found[2], wanted[2], self.given
        for row in (tokens != other).nonzero()[:, 0].tolist():
            z = kernel_reference.scaled(
                given["logits"].double(), given["temperature"], given["scale"], given["cap"]
            )[row]
            step = self.written["drawn"][row]
            if given["minimum"] is not None and step < given["minimum"][row]:
                z[given["ends"]] = float("-inf")
            sums = torch.softmax(z, -1).cumsum(-1)
            low, high = sorted((int(tokens[row]), int(other[row])))
            uniform = given["draws"][step, row]
            assert abs(sums[low] - uniform) < DRAWN_APART, (row, low, high)
            assert abs(sums[high - 1] - uniform) < DRAWN_APART, (row, low, high)
            for one, two in zip(found, wanted, strict=True):
                if one.ndim == 1:
                    one[row] = two[row]
                else:
                    one[step, given["origin"][row]] = two[step, given["origin"][row]]


def case_of(name, seed, dtype=torch.float32, prefill=True):
    """A random case of a kernel."""
    most = 200 if name in LEARN_NAMES else 20
    return getattr(Maker(seed, dtype, prefill, most if name in TILED else 5), name)()


def is_float(x):
    return isinstance(x, torch.Tensor) and x.dtype.is_floating_point


class Maker:
    """Draws cases of one dtype from a seed; with `prefill` also those of several tokens a row.

    The interpreter takes milliseconds a program, so `most` rows is less where each is a program.
    """

    def __init__(self, seed, dtype, prefill=True, most=20):
        self.prefill = prefill
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        agents = self.integer(1, 5)
        counts = (0, 1, 2, 5, 16, 17) if most < 200 else (0, 1, 5, 17, 64, 65, 140)
        self.counts = [self.pick(*counts) for _ in range(agents)]
        self.counts[self.integer(0, agents)] = self.integer(1, 4)
        if sum(self.counts) > most:
            self.counts = [min(count, 3 if most > 9 else 1) for count in self.counts]
        self.ranks = [self.pick(0, 1, 3, 8, 16, 17, 64) for _ in range(agents)]
        self.total = sum(self.counts)
        self.owners = torch.arange(agents).repeat_interleave(torch.tensor(self.counts))

    def integer(self, low, high):
        return int(torch.randint(low, high, (), generator=self.generator))

    def pick(self, *among):
        return among[self.integer(0, len(among))]

    def noise(self, *sizes, scale=1.0):
        return (torch.randn(sizes, generator=self.generator) * scale).to(self.dtype)

    def maybe(self, x):
        return x if self.integer(0, 2) else None

    def tiles(self):
        found, start = [], 0
        for agent, count in enumerate(self.counts):
            found += [(start + i, min(16, count - i), agent) for i in range(0, count, 16)]
            start += count
        return torch.tensor(found)

    def adapted(self, parts):
        """The first arguments of a linear layer; columns of other agents are NaN."""
        width, adapts = sum(parts), self.integer(0, 5) and any(self.ranks)
        column = offset = 0
        table, own = [[] for _ in self.ranks], torch.zeros(self.total, 0, dtype=torch.bool)
        b = []
        for part in parts:
            stride = operators.padded(part)
            for agent, rank in enumerate(self.ranks if adapts else [0] * len(self.ranks)):
                table[agent].append((column, rank, offset))
                mine = (self.owners == agent)[:, None].expand(-1, rank)
                own = torch.cat([own, mine], 1)
                rows = self.noise(rank, stride, scale=0.3)
                rows[:, part:] = float("nan")
                b.append(rows.flatten())
                column, offset = column + rank, offset + rank * stride
        total = -(-(width + column) // 64) * 64
        low = torch.full((self.total, total - width), float("nan"), dtype=self.dtype)
        low[:, :column] = self.noise(self.total, column)
        low[:, :column][~own] = float("nan")
        z = torch.cat([self.noise(self.total, width), low], 1)
        low = z[:, width:] if self.integer(0, 3) else low.contiguous()
        rank = -(-max(self.ranks) // 16) * 16 if adapts else 0
        b = torch.cat(b) if b and column else self.noise(1)
        return {
            "z": z, "low": low, "b": b, "adapters": torch.tensor(table), "rank": rank,
            "bias": self.maybe(self.noise(width)),
        }  # fmt: skip

    def embed_norm(self):
        size = self.pick(8, 32, 96, 130)
        return Case(
            "embed_norm", self.owners,
            {
                "tokens": torch.randint(0, 9, (self.total,), generator=self.generator),
                "table": self.noise(9, size), "weight": self.noise(size),
                "factor": self.pick(1.0, 12.0), "eps": 1e-6,
            }, rows=("tokens",),
        )  # fmt: skip

    def qkv(self):
        heads, kv = self.pick((1, 1), (1, 1), (4, 2), (3, 1))
        size, room = self.pick(32, 48, 64, 96, 128, 256), 9
        norms = self.integer(0, 2)
        turn = self.maybe((self.noise(room, size // 2), self.noise(room, size // 2)))
        positions = torch.randint(0, room, (self.total,), generator=self.generator)
        # In a prefill, a row of the cache has several tokens, each with a column of its own.
        columns = self.pick(
            *(n for n in (1, 2, 3) if self.total % n == 0 and (n == 1 or self.prefill))
        )
        if columns > 1:
            positions = torch.arange(columns).repeat(self.total // columns) + self.integer(0, 6)
        shape = self.total // columns, kv, room, size
        if self.prefill and not self.integer(0, 4):  # in learning, without a cache
            shape = self.total, kv, size
        cache = torch.full(shape, 7.0, dtype=self.dtype)
        return Case(
            "qkv", self.owners,
            {
                **self.adapted([heads * size, kv * size, kv * size]), "tiles": self.tiles(),
                "positions": positions, "cos": turn and turn[0], "sin": turn and turn[1],
                "q_norm": self.noise(size) if norms else None,
                "k_norm": self.noise(size) if norms else None, "q_eps": 1e-6, "k_eps": 1e-5,
            },
            {
                "q": self.noise(self.total, heads, size), "keys": cache, "values": cache.clone(),
            },
            ("z", "low", "positions", "q") + (("keys", "values") if columns == 1 else ()),
        )  # fmt: skip

    def attend(self, name="attend", rooms=(5, 64, 150)):
        kv, group = self.pick(1, 2), self.pick(1, 2, 3, 7, 8)
        size, room = self.pick(32, 48, 64, 96, 128, 256), self.pick(*rooms)
        positions = torch.randint(0, room, (self.total,), generator=self.generator)
        seen = torch.arange(room) <= positions[:, None]
        cache = [self.noise(self.total, kv, room, size) for _ in range(2)]
        for piece in cache:
            piece[~seen[:, None].expand(-1, kv, -1)] = float("nan")
        return Case(
            name, self.owners,
            {
                "q": self.noise(self.total, kv * group, size), "keys": cache[0],
                "values": cache[1], "positions": positions, "scale": size**-0.5,
                "window": self.pick(0, 0, 1, 4, 70),
            }, rows=("q", "keys", "values", "positions"),
        )  # fmt: skip

    def attend_splits(self):
        return self.attend("attend_splits", (5, 64, 150))

    def add_norm(self):
        size = self.pick(8, 32, 96, 130, 1000)
        post = self.maybe(self.noise(size))
        return Case(
            "add_norm", self.owners,
            {
                **self.adapted([size]), "owners": self.owners, "x": self.noise(self.total, size),
                "post": post, "post_eps": 1e-6, "weight": self.noise(size), "eps": 1e-5,
                "factor": self.pick(1.0, 0.22),
            }, rows=("z", "low", "owners", "x"),
        )  # fmt: skip

    def gate_up(self):
        size = self.pick(8, 33, 100, 300)
        return Case(
            "gate_up", self.owners,
            {
                **self.adapted([size, size]), "tiles": self.tiles(), "size": size,
                "gelu": bool(self.integer(0, 2)),
            }, rows=("z", "low"),
        )  # fmt: skip

    def spans(self):
        """Tiles in two spans, as of prefixes and rests, and the first of each agent."""
        found, start = [], 0
        for part in (0, 1):
            for agent, count in enumerate(self.counts):
                stop = start + (count // 3 if part == 0 else count - count // 3)
                tile = operators.LEARN_TILE
                found += [(agent, i, min(tile, stop - i)) for i in range(start, stop, tile)]
                start = stop
        table = torch.tensor(sorted(found))
        self.owners = torch.zeros(self.total, dtype=torch.long)
        for agent, at, count in found:
            self.owners[at : at + count] = agent
        firsts = torch.searchsorted(table[:, 0].contiguous(), torch.arange(len(self.counts) + 1))
        return table[:, [1, 2, 0]].contiguous(), firsts

    def _low(self):
        """Tiles, and the agents, ranks and features of their matrices."""
        return self.spans()[0], (len(self.counts), self.pick(1, 8, 48, 70), self.pick(8, 33, 130))

    def project(self):
        tiles, (agents, rank, size) = self._low()
        return Case(
            "project", self.owners,
            {
                "x": self.noise(self.total, size), "matrix": self.noise(agents, rank, size),
                "scale": torch.rand(agents, rank, generator=self.generator) + 0.5, "tiles": tiles,
            }, rows=("x",),
        )  # fmt: skip

    def add_low(self):
        tiles, (agents, rank, size) = self._low()
        matrix = self.noise(agents, rank, size)
        given = {"low": self.noise(self.total, rank), "matrix": matrix, "tiles": tiles}
        written = {"y": self.noise(self.total, size)}
        return Case("add_low", self.owners, given, written, ("low", "y"))

    def outer(self):
        tiles, firsts = self.spans()
        agents, rank, sizes = len(self.counts), self.pick(1, 8, 48, 70), (8, 33, 130)
        inputs, outputs, offset = self.pick(*sizes), self.pick(*sizes), self.pick(0, 7)
        numbers = offset + agents * rank * (inputs + outputs)
        return Case(
            "outer", self.owners,
            {
                "d_low": self.noise(self.total, rank), "x": self.noise(self.total, inputs),
                "low": self.noise(self.total, rank), "grad": self.noise(self.total, outputs),
                "tiles": tiles, "firsts": firsts, "offset": offset,
            }, {"out": torch.zeros(self.pick(1, 2, 3), numbers)}, ("d_low", "x", "low", "grad"),
        )  # fmt: skip

    def norm_backward(self):
        size = self.pick(8, 32, 96, 130, 1000)
        more = self.maybe(self.noise(self.total, size))
        return Case(
            "norm_backward", self.owners,
            {
                "more": more, "grad": self.noise(self.total, size),
                "x": self.noise(self.total, size), "weight": self.noise(size), "eps": 1e-5,
            }, rows=("more", "grad", "x"),
        )  # fmt: skip

    def glu_backward(self):
        size = self.pick(8, 33, 100, 1300)
        return Case(
            "glu_backward", self.owners, {"gelu": bool(self.integer(0, 2))},
            {"both": self.noise(self.total, 2 * size), "grad": self.noise(self.total, size)},
            ("both", "grad"),
        )  # fmt: skip

    def qkv_backward(self):
        heads, kv = self.pick((1, 1), (4, 2), (3, 1))
        size, norms = self.pick(32, 48, 64, 128, 256), self.integer(0, 2)
        shared = self.integer(0, 3)
        start = self.total // 3
        places = torch.arange(start)
        places[torch.rand(start, generator=self.generator) < 0.3] = -1
        places[places >= 0] = torch.arange(int((places >= 0).sum()))
        count = int((places >= 0).sum())
        turn = self.maybe((self.noise(9, size // 2), self.noise(9, size // 2)))
        parts = [self.noise(self.total, n, size) for n in (heads, kv, kv)]
        more = [self.noise(n, h, size)
                for n, h in ((self.total - start, heads), (count, kv), (count, kv))]  # fmt: skip
        return Case(
            "qkv_backward", self.owners,
            {
                **dict(zip(("dq", "dk", "dv"), parts, strict=True)),
                "more": more if shared else [], "places": places if shared else None,
                "joined": self.noise(self.total, (heads + 2 * kv) * size) if norms else None,
                "positions": torch.randint(0, 9, (self.total,), generator=self.generator),
                "cos": turn and turn[0], "sin": turn and turn[1],
                "q_norm": self.noise(size) if norms else None,
                "k_norm": self.noise(size) if norms else None, "q_eps": 1e-6, "k_eps": 1e-5,
            }, rows=("dq", "dk", "dv", "joined", "positions"),
        )  # fmt: skip

    def join_parts(self):
        heads, size, start = self.pick(1, 3), self.pick(8, 24, 64), self.total // 3
        rest = self.total - start
        sums = [torch.randn(heads, n, generator=self.generator) * 20 for n in (self.total, rest)]
        return Case(
            "join_parts", self.owners, {"more": self.noise(rest, heads, size)},
            {
                "out": self.noise(self.total, heads, size), "sums": sums[0],
                "more_sums": sums[1],
            },
        )  # fmt: skip

    def head_slopes(self):
        size, rows = self.pick(3, 130, 4097, 9001), self.total
        logits = self.noise(rows, size, scale=self.pick(0.5, 3.0))
        targets = torch.randint(0, size, (rows,), generator=self.generator)
        if self.integer(0, 2):  # a target that has nearly all of the weight
            logits[torch.arange(rows), targets] = 30.0
        slopes = self.integer(0, 3)
        return Case(
            "head_slopes", self.owners,
            {
                "targets": targets, "inverse": torch.rand(rows, generator=self.generator) + 0.3,
                "slopes": slopes,
            },
            {
                "logits": logits, "above": torch.zeros_like(logits),
                "out": torch.zeros(rows, 4),
            },
            ("targets", "inverse", "logits", "above", "out"),
        )  # fmt: skip

    def draw(self):
        size, steps, rows = self.pick(5, 130, 4097, 9001), 6, self.total
        ends = torch.zeros(size, dtype=torch.bool)
        ends[torch.randint(0, size, (self.pick(1, 3),), generator=self.generator)] = True
        logits = self.noise(rows, size, scale=self.pick(0.5, 3.0))
        if self.integer(0, 2):
            logits[:, -2:] = float("-inf")
        if self.integer(0, 2):  # one token has all of the weight
            logits[torch.arange(rows), torch.arange(rows) % size] = 60.0

        def integers(high):
            return torch.randint(0, high, (rows,), generator=self.generator)

        draws = torch.rand(steps, rows, generator=self.generator, dtype=torch.float64)
        draws[0] = 1 - 2**-53
        draws[1] = 0.0
        return Case(
            "draw", self.owners,
            {
                "logits": logits,
                "temperature": torch.rand(rows, generator=self.generator) + 0.3,
                "greedy": self.maybe(integers(2).bool()), "draws": draws,
                "minimum": self.maybe(integers(4)), "limit": integers(6) + 1, "ends": ends,
                "origin": torch.randperm(rows, generator=self.generator),
                "scale": self.pick(1.0, 0.25), "cap": self.pick(0.0, 30.0),
            },
            {
                "drawn": integers(steps), "finished": integers(2).bool(), "tokens": integers(9),
                "out_tokens": torch.full((steps, rows), -7),
                "out_logprobs": torch.zeros(steps, rows),
            },
            ("logits", "temperature", "greedy", "minimum", "limit", "drawn", "finished", "tokens"),
        )  # fmt: skip
