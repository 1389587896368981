def depth_angles(size, rope, at, device):
    """Angles of this application: odd pairs count from the last one backwards where half are reversed."""
    turns = frequencies(size, rope, device)
    position = torch.full_like(turns, float(at.depth))
    if rope["half_reversed"]:
        position[1::2] = at.depths - 1 - at.depth
    return position * turns
