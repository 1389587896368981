def activate(kind, gate, up):
    """The inner values of a network."""
    if kind == "swiglu":  #? swiglu
        return F.silu(gate) * up  #? swiglu
    if kind == "geglu":  #? geglu
        return F.gelu(gate, approximate="tanh") * up  #? geglu
    if kind == "geglu_erf":  #? geglu_erf
        return F.gelu(gate) * up  #? geglu_erf
    if kind == "swiglu_clamped":  #? swiglu_clamped
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)  #? swiglu_clamped
        return (up + 1.0) * gate * torch.sigmoid(1.702 * gate)  #? swiglu_clamped
    if kind == "gelu":  #? gelu
        return F.gelu(up, approximate="tanh")  #? gelu
    if kind == "relu":  #? relu
        return F.relu(up)  #? relu
    if kind == "relu2":  #? relu2
        return F.relu(up).square()  #? relu2
    raise ValueError(kind)
