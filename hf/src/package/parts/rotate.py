def rotate(x, angles, rope):
    """Turns pairs `(i, i + d/2)` of the first elements of the last axis, as many as there are angles."""  #? share
    """Turns pairs `(i, i + d/2)` of the last axis."""  #? !share
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if rope["scaling"]:  #? yarn
        cos, sin = rope["scaling"]["attention"] * cos, rope["scaling"]["attention"] * sin  #? yarn
    x, rest = x.split([2 * angles.shape[-1], x.shape[-1] - 2 * angles.shape[-1]], -1)  #? share
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)  #? share
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)  #? !share
