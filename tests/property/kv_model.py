"""The KV cache as a dictionary of prefixes: one cell per page, every question answered by looking at everything.

Slow and obvious, the oracle for the native tree: same verbs, same answers, same eviction order, no nodes. A cell is a
full page; a partly filled page belongs to its cursor (`tail`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class Cell:
    tokens: tuple[int, ...]
    parent: Cell | None
    space: int
    start: int
    steps: list[int | None] = field(default_factory=list)
    lock: int = 0
    tick: int = 0
    hits: int = 0
    aux: float = 0.0
    detached: bool = False
    children: dict[tuple[int, ...], Cell] = field(default_factory=dict)
    cut_off: list[Cell] = field(default_factory=list)  # flushed children that are still locked
    marks: list[Mark] = field(default_factory=list)
    page: int | None = None

    def path(self) -> list[Cell]:
        cells, cell = [], self
        while cell.parent is not None:
            cells.append(cell)
            cell = cell.parent
        return cells[::-1]

    def below(self) -> list[Cell]:
        cells = [self]
        for cell in cells:
            cells += [*cell.children.values(), *cell.cut_off]
        return cells

    @property
    def pending(self) -> bool:
        return any(step is not None for step in self.steps)


@dataclass(eq=False)
class Mark:
    is_pin: bool
    cell: Cell | None
    expires_at: float = 0.0


@dataclass(eq=False)
class ModelCursor:
    cell: Cell
    priority: int
    birth: int
    tail: list[tuple[int, int | None]] = field(default_factory=list)
    open: bool = True
    tail_cut_off: bool = False  # the tail was flushed, so the page it becomes can't be matched

    @property
    def last_is_pending(self) -> bool:
        if self.tail:
            return self.tail[-1][1] is not None
        return bool(self.cell.steps) and self.cell.steps[-1] is not None

    @property
    def length(self) -> int:
        return self.cell.start + len(self.cell.tokens) + len(self.tail)


class Model:
    def __init__(self, num_pages: int, page_size: int, policy: str, watermark: float, pin_budget: float) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.policy = policy
        self.watermark = watermark
        self.pin_budget = pin_budget
        self.roots: list[Cell] = []
        self.cursors: list[ModelCursor] = []
        self.zombies: list[ModelCursor] = []
        self.marks: list[Mark] = []
        self.steps: list[int] = []
        self.tick = 0
        self.clock = np.float32(0)
        self.evicted = [0, 0, 0]  # by class
        self.flushed = 0

    # --- questions ---

    def cells(self) -> list[Cell]:
        return [cell for root in self.roots for cell in root.below()[1:]]

    def holders(self) -> list[ModelCursor]:
        return [c for c in self.cursors if c.open] + self.zombies

    def num_free(self) -> int:
        return self.num_pages - len(self.cells()) - sum(bool(c.tail) for c in self.holders())

    def num_evictable(self) -> int:
        return sum(cell.lock == 0 for cell in self.cells())

    def class_of(self, cell: Cell) -> int:
        below = [mark for c in cell.below() for mark in c.marks]
        return 2 if any(not m.is_pin for m in below) else 1 if below else 0

    def is_pinned(self, cell: Cell) -> bool:
        return any(mark.is_pin for c in cell.below() for mark in c.marks)

    def key(self, cell: Cell) -> tuple[float, ...]:
        klass = self.class_of(cell)
        end = cell.start + self.page_size
        value = {
            "lru": 0.0,
            "fifo": 0.0,
            "lfu": cell.hits,
            "slru": cell.hits > 1,
            "priority": cell.aux,
            "gdsf": float(cell.aux) + cell.hits * (1.0 + end / 4096.0),
        }[self.policy]
        return klass, float(value), cell.tick

    def walk(self, cell: Cell, tokens: list[int]) -> list[Cell]:
        passed = []
        for i in range(0, len(tokens) - self.page_size + 1, self.page_size):
            child = cell.children.get(tuple(tokens[i : i + self.page_size]))
            if child is None:
                break
            passed.append(child)
            cell = child
        return passed

    def peek(self, space: int, tokens: list[int]) -> int:
        return len(self.walk(self.roots[space], tokens)) * self.page_size

    # --- cursors ---

    def create_space(self) -> int:
        self.roots.append(Cell((), None, len(self.roots), 0))
        return len(self.roots) - 1

    def new_cursor(self, cell: Cell, priority: int) -> ModelCursor:
        self.tick += 1
        cursor = ModelCursor(cell, priority, self.tick)
        self.cursors.append(cursor)
        return cursor

    def use(self, cells: list[Cell], cursor: ModelCursor) -> None:
        for cell in cells:
            cell.lock += 1
            cell.hits += 1
            if self.policy == "priority":
                cell.aux = max(cell.aux, cursor.priority)

    def open(self, space: int, tokens: list[int], priority: int) -> ModelCursor:
        cells = self.walk(self.roots[space], tokens)
        cursor = self.new_cursor(cells[-1] if cells else self.roots[space], priority)
        self.use(cells, cursor)
        return cursor

    def advance(self, cursor: ModelCursor, tokens: list[int]) -> int:
        if cursor.tail:
            return 0
        cells = self.walk(cursor.cell, tokens)
        self.use(cells, cursor)
        if cells:
            cursor.cell = cells[-1]
        return len(cells) * self.page_size

    def append(self, cursor: ModelCursor, tokens: list[int], step: int) -> tuple[bool, int, int]:
        size = self.page_size
        held = [token for token, _ in cursor.tail]
        base = cursor.length
        first_page = tuple((held + tokens)[:size])
        moves = bool(held) and len(first_page) == size and first_page in cursor.cell.children
        cells = self.walk(cursor.cell, held + tokens) if moves or not held else []
        at = base - len(held) + len(cells) * size if cells else base
        needed = -(-(base + len(tokens)) // size) - -(-at // size)
        locking = sum(cell.lock == 0 for cell in cells)
        if needed > self.num_free() + moves + self.num_evictable() - locking:
            return False, 0, -1
        if moves:
            cursor.tail, cursor.tail_cut_off = [], False
        self.use(cells, cursor)
        if cells:
            cursor.cell = cells[-1]
        self.evict(max(0, needed - self.num_free()))
        rest = tokens[at - base :]
        if rest:
            if step not in self.steps:
                self.steps.append(step)
            for token in rest:
                self.push(cursor, token, step)
            if self.watermark:
                self.evict(max(0, int(self.watermark * self.num_pages) - self.num_free()))
        return True, at - base, base - len(held) if moves else -1

    def push(self, cursor: ModelCursor, token: int, step: int) -> None:
        cursor.tail.append((token, step))
        if len(cursor.tail) < self.page_size:
            return
        tokens = tuple(token for token, _ in cursor.tail)
        parent = cursor.cell
        assert cursor.tail_cut_off or tokens not in parent.children
        cell = Cell(tokens, parent, parent.space, parent.start + len(parent.tokens))
        cell.steps = [step for _, step in cursor.tail]
        cell.lock, cell.hits, cell.tick, cell.detached = 1, 1, cursor.birth, parent.detached or cursor.tail_cut_off
        cell.aux = cursor.priority if self.policy == "priority" else 0.0
        if cursor.tail_cut_off:
            parent.cut_off.append(cell)
        else:
            parent.children[tokens] = cell
        cursor.cell, cursor.tail, cursor.tail_cut_off = cell, [], False

    def fork(self, cursor: ModelCursor) -> ModelCursor:
        forked = self.new_cursor(cursor.cell, cursor.priority)
        for cell in cursor.cell.path():
            cell.lock += 1
        return forked

    def close(self, cursor: ModelCursor) -> None:
        cursor.open = False
        if cursor.last_is_pending:
            self.zombies.append(cursor)
        else:
            self.release(cursor)

    def release(self, cursor: ModelCursor) -> None:
        cursor.tail = []
        self.tick += 1
        for cell in reversed(cursor.cell.path()):
            cell.lock -= 1
            if cell.lock:
                continue
            if cell.detached:
                self.remove(cell)
                continue
            if self.policy != "fifo":
                cell.tick = self.tick
            if self.policy == "gdsf":
                cell.aux = float(self.clock)

    # --- steps ---

    def complete(self, step: int) -> None:
        if step in self.steps:
            assert self.steps[0] == step
            self.steps.remove(step)
        for cell in self.cells():
            cell.steps = [None if s == step else s for s in cell.steps]
        for cursor in self.holders():
            cursor.tail = [(t, None if s == step else s) for t, s in cursor.tail]
        self.release_zombies()

    def release_zombies(self) -> None:
        for cursor in list(self.zombies):
            if not cursor.last_is_pending:
                self.zombies.remove(cursor)
                self.release(cursor)

    def stands_on(self, cursor: ModelCursor, step: int) -> bool:
        cells = cursor.cell.path()
        return any(step in c.steps for c in cells) or any(s == step for _, s in cursor.tail)

    def discard(self, step: int) -> None:
        if step not in self.steps:
            return
        self.steps.remove(step)
        for cursor in self.zombies:
            if self.stands_on(cursor, step):
                cursor.tail = []
                for cell in cursor.cell.path():
                    if step in cell.steps:
                        assert cell.parent is not None
                        cursor.cell = cell.parent
                        break
        for cell in self.cells():
            if step in cell.steps:
                for gone in reversed(cell.below()):
                    self.remove(gone)
                    gone.steps = []
        self.release_zombies()

    # --- space ---

    def remove(self, cell: Cell) -> None:
        parent = cell.parent
        assert parent is not None
        assert not cell.children
        assert not cell.cut_off
        if cell in parent.cut_off:
            parent.cut_off.remove(cell)
        elif parent.children.get(cell.tokens) is cell:
            del parent.children[cell.tokens]
        for mark in cell.marks:
            mark.cell = parent
        parent.marks += cell.marks
        cell.marks = []

    def evict(self, num_pages: int) -> int:
        freed = 0
        while freed < num_pages:
            leaves = [c for c in self.cells() if c.lock == 0 and not c.children and not c.cut_off]
            if not leaves:
                break
            keys = sorted((self.key(leaf), i) for i, leaf in enumerate(leaves))
            assert len(keys) == 1 or keys[0][0] < keys[1][0], "two leaves may not rank alike"
            victim = leaves[keys[0][1]]
            self.evicted[self.class_of(victim)] += 1
            if self.policy == "gdsf":
                self.clock = max(self.clock, np.float32(self.key(victim)[1]))
            self.remove(victim)
            freed += 1
        return freed

    def flush_cell(self, top: Cell) -> int:
        freed = 0
        parent = top.parent
        assert parent is not None
        for cell in reversed(top.below()):
            for mark in cell.marks:
                mark.cell = None
            cell.marks = []
            if cell.lock == 0:
                self.remove(cell)
                freed += 1
            else:
                cell.detached = True
        if top.lock and top not in parent.cut_off:
            del parent.children[top.tokens]
            parent.cut_off.append(top)
        self.flushed += freed
        return freed

    def flush_space(self, space: int) -> int:
        for cursor in self.holders():
            if cursor.cell is self.roots[space] and cursor.tail:
                cursor.tail_cut_off = True
        return sum(self.flush_cell(child) for child in list(self.roots[space].children.values()))

    def flush_prefix(self, space: int, prefix: list[int]) -> int:
        if not prefix:
            return self.flush_space(space)
        cells = self.walk(self.roots[space], prefix)
        if not cells or len(cells) < len(prefix) // self.page_size:
            return 0
        top = cells[-1]
        while top.parent is not None and top.parent.parent is not None:
            parent = top.parent
            tails = sum(c.cell is parent and bool(c.tail) for c in self.holders())
            if len(parent.children) + len(parent.cut_off) + tails > 1:
                break
            top = parent
        return self.flush_cell(top)

    # --- marks ---

    def mark(self, space: int, tokens: list[int], *, is_pin: bool, expires_at: float = 0.0) -> Mark | None:
        cells = self.walk(self.roots[space], tokens)
        if is_pin:
            added = sum(not self.is_pinned(cell) for cell in cells)
            pinned = sum(self.is_pinned(cell) for cell in self.cells())
            if not cells or pinned + added > int(self.pin_budget * self.num_pages):
                return None
        mark = Mark(is_pin, cells[-1] if cells else self.roots[space], expires_at)
        assert mark.cell is not None
        mark.cell.marks.append(mark)
        self.marks.append(mark)
        return mark

    def unmark(self, mark: Mark) -> None:
        if mark.cell is not None:
            mark.cell.marks.remove(mark)
        self.marks.remove(mark)

    def expire(self, now: float) -> int:
        over = [mark for mark in self.marks if mark.is_pin and mark.expires_at <= now]
        for mark in over:
            self.unmark(mark)
        return len(over)
