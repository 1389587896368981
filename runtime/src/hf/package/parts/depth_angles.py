def depth_angles(size, rope, at, device):
    """Angles of this application: odd pairs count from the last one backwards where half are reversed."""
    position = torch.full((size // 2,), float(at.depth), dtype=torch.float64, device=device)
    if rope["half_reversed"]:
        position[1::2] = at.depths - 1 - at.depth
    return position * frequencies(size, rope, device)
