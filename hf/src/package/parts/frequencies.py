def frequencies(size, rope, device):
    """Turns of the pairs `(i, i + size/2)` from one position to the next."""
    size = int(rope["share"] * size + 1e-9)  #? share
    turns = rope["base"] ** (-2.0 * torch.arange(size // 2, dtype=torch.float64, device=device) / size)
    s = rope["scaling"]  #? scaling
    if s and s["type"] == "llama3":  #? llama3
        # Long waves are stretched, short ones kept, those between stretched in part (Llama 3).  #? llama3
        wave = 2.0 * math.pi / turns  #? llama3
        smooth = ((s["original_context"] / wave - s["low"]) / (s["high"] - s["low"])).clamp(0.0, 1.0)  #? llama3
        turns = (1.0 - smooth) * turns / s["factor"] + smooth * turns  #? llama3
    if s and s["type"] == "linear":  #? stretched
        turns = turns / s["factor"]  #? stretched
    if s and s["type"] == "yarn":  #? yarn
        # Pairs that turn seldom in the first context are stretched, those that turn often kept (YaRN).  #? yarn
        pair = lambda times: size / 2 * math.log(s["original_context"] / (times * 2.0 * math.pi)) / math.log(rope["base"])  #? yarn
        low, high = pair(s["fast"]), pair(s["slow"])  #? yarn
        if s["truncate"]:  #? yarn
            low, high = math.floor(low), math.ceil(high)  #? yarn
        low, high = max(low, 0.0), min(high, size - 1.0)  #? yarn
        part = (torch.arange(size // 2, dtype=torch.float64, device=device) - low) / (high - low if high != low else 1e-3)  #? yarn
        part = part.clamp(0.0, 1.0)  #? yarn
        turns = turns / s["factor"] * part + turns * (1.0 - part)  #? yarn
    return turns
