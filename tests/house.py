"""Draw the house from its imports: rooms, their floors, and which room uses which.

    python tests/house.py docs/images/house.png

A room is a folder of the package or a file beside the folders. A room stands one floor above the highest room that it
imports. The picture leaves out arrows that others imply.
"""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hfppo"
EDGE = 0.19  # from the middle of a box to its edge, in floors
Rooms = dict[str, set[str]]  # the rooms that each one imports


def find_rooms() -> Rooms:
    """Return the rooms by name, `__init__` and the modules' own rooms left out."""
    rooms: Rooms = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room != "__init__":
            rooms.setdefault(room, set()).update(imported_rooms(path) - {room})
    return {room: {other for other in others if other in rooms} for room, others in rooms.items()}


def imported_rooms(path: Path) -> set[str]:
    """Return the second parts of the names that a file imports from the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            _, *room = node.module.split(".")
            found.update(room[:1] or [alias.name for alias in node.names])
    return found


def find_floors(rooms: Rooms) -> dict[str, int]:
    """Return the floor of each room, from 0; a circle of imports is a CycleError."""
    floors: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        floors[room] = max((floors[other] + 1 for other in rooms[room]), default=0)
    return floors


def needed_arrows(rooms: Rooms) -> list[tuple[str, str]]:
    """Return the arrows that no others imply, each from a room to one that it imports."""
    below: Rooms = {}
    for room in TopologicalSorter(rooms).static_order():
        below[room] = rooms[room].union(*(below[other] for other in rooms[room]))
    return [(a, b) for a in rooms for b in rooms[a] if not any(b in below[other] for other in rooms[a] - {b})]


def draw(rooms: Rooms, file: str) -> None:
    """Write the picture."""
    import matplotlib.pyplot as plt

    floors = find_floors(rooms)
    width, height = max(list(floors.values()).count(n) for n in set(floors.values())), max(floors.values()) + 1
    figure, axes = plt.subplots(figsize=(1.9 * width + 0.5, 0.85 * height + 0.3))
    places = {}
    for floor in range(height):
        own = sorted(room for room in rooms if floors[room] == floor)
        for number, room in enumerate(own):
            places[room] = ((number + 0.5) * width / len(own), floor)
    for above, under in sorted(needed_arrows(rooms)):
        (x, y), (x_under, y_under) = places[above], places[under]
        arrow = {"arrowstyle": "-|>", "color": "0.6", "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x_under, y_under + EDGE), (x, y - EDGE), arrowprops=arrow)
    for room, place in places.items():
        box = {"boxstyle": "round,pad=0.35", "fc": "#eef3fb", "ec": "#3b5b92"}
        axes.text(*place, room, ha="center", va="center", fontsize=9, bbox=box)
    axes.set_xlim(0, width)
    axes.set_ylim(-0.6, height - 0.4)
    axes.axis("off")
    figure.savefig(file, dpi=110, bbox_inches="tight")


def main(file: str | None) -> None:
    rooms = find_rooms()
    floors, arrows = find_floors(rooms), sum(map(len, rooms.values()))
    print(f"{len(rooms)} rooms on {max(floors.values()) + 1} floors, {arrows} arrows, none up, no circle")
    for floor in range(max(floors.values()), -1, -1):
        print(f"{floor:2}  {', '.join(sorted(room for room in rooms if floors[room] == floor))}")
    if file is not None:
        draw(rooms, file)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
