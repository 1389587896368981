def frequencies(size, rope, device):
    """Turns of the pairs `(i, i + size/2)` from one position to the next."""
    turns = rope["base"] ** (-2.0 * torch.arange(size // 2, dtype=torch.float64, device=device) / size)
    if rope["scaling"]:  #? scaling
        # Long waves are stretched, short ones kept, those between stretched in part (Llama 3).  #? scaling
        s = rope["scaling"]  #? scaling
        wave = 2.0 * math.pi / turns  #? scaling
        smooth = ((s["original_context"] / wave - s["low"]) / (s["high"] - s["low"])).clamp(0.0, 1.0)  #? scaling
        turns = (1.0 - smooth) * turns / s["factor"] + smooth * turns  #? scaling
    return turns
