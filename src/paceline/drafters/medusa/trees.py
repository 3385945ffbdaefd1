"""Draft trees of fixed shape that were published with Medusa heads (Cai et al. 2024, arXiv:2401.10774, section 2.3.3).

A tree is a list of nodes, the most useful first, so that the beginning of the list is the tree for a smaller budget. A node is written as
its path from the root, with one digit for each head: the rank of the head's candidate token, 0 for the most probable. "02" is the third
candidate of the second head, after the first candidate of the first head.
"""

from functools import lru_cache

DYNAMIC_TREES = ("probability", "accuracy")
"""Names of the ways to choose a tree's nodes at each step; see `MedusaDrafter`."""

STATIC_TREES = {
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 011 006 "
        "030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
    "vicuna_7b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7 030 0001 005 21 "
        "006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31 0020 70 14"
    ),
    "vicuna_13b_stage2": (
        "0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 0010 030 101 40 006 "
        "08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 013 102 0011 300 1000"
    ),
    "vicuna_33b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 030 005 0001 08 21 "
        "09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 009 31 102 22"
    ),
    "zephyr_stage2": (
        "0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011 004 0000 50 030 "
        "13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 23"
    ),
    "vicuna_7b_stage1": (
        "0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 020 011 004 60 14 "
        "005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51"
    ),
}


@lru_cache(maxsize=256)
def static_tree_nodes(name: str, max_depth: int, max_rows: int) -> tuple[tuple[int, int, int], ...]:
    """Return the nodes of a published tree that fit a budget.

    Args:
        name: key of `STATIC_TREES`.
        max_depth: maximum number of levels below the root.
        max_rows: maximum number of rows of the target's pass, the root's row included.

    Returns:
        (parent, depth, rank) of nodes 1, 2, …: parent 0 is the root, its children have depth 0; rank among the head's candidates.
    """
    node_by_path = {"": 0}
    nodes: list[tuple[int, int, int]] = []
    for path in STATIC_TREES[name].split():
        parent = node_by_path.get(path[:-1])
        if parent is None or len(path) > max_depth or len(node_by_path) == max_rows:
            continue
        node_by_path[path] = len(node_by_path)
        nodes.append((parent, len(path) - 1, int(path[-1])))
    return tuple(nodes)
