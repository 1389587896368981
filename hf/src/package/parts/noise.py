def noise(positions, size):
    """Normal numbers cut at 3 for tokens at these places: those that dreamc draws, by Philox4x32-10 and Box and Muller."""
    element = positions.cpu().numpy().astype(np.uint64)[..., None] * np.uint64(size) + np.arange(size, dtype=np.uint64)
    low, found, drawn = np.uint64(0xFFFFFFFF), np.zeros(element.shape), np.zeros(element.shape, dtype=bool)
    for again in range(8):
        c = [element & low, element >> np.uint64(32), np.full_like(element, again), np.zeros_like(element)]
        keys = [@NOISE_KEY@]
        for _ in range(10):
            p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
            first, second = (np.uint64(key) for key in keys)
            c = [(q >> np.uint64(32)) ^ c[1] ^ first, q & low, (p >> np.uint64(32)) ^ c[3] ^ second, p & low]
            keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
        words = [c[k] | c[k + 1] << np.uint64(32) for k in (0, 2)]
        radius, turn = (((word >> np.uint64(11)) + np.uint64(1)).astype(np.float64) / 2.0**53 for word in words)
        number = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * turn)
        fits = ~drawn & (np.abs(number) <= 3.0)
        found[fits], drawn = number[fits], drawn | fits
    return torch.from_numpy(found.astype(np.float32)).to(positions.device)
