// functions
// No-ops are one more group, after the others.
DEVICE i64 group_of(int chosen) { return chosen >= 0 && chosen < EXPERTS ? chosen : EXPERTS; }
// pass places: a slot, whose place is the number of those before it
i64 own = group_of(chosen[at]), place = 0;
for (i64 s = 0; s < SLOTS; ++s) {
    i64 other = group_of(chosen[s]);
    place += other < own || (other == own && s < at);
}
order[place] = (int)at;
inverse[at] = (int)place;
// pass offsets: the beginning of a group
i64 count = 0;
for (i64 s = 0; s < SLOTS; ++s) count += group_of(chosen[s]) < at;
offsets[at] = (int)count;
// pass round: a place of the order, whose slot is kept or not
int slot = order[at], expert = slot >= 0 && slot < SLOTS ? chosen[slot] : -1;
if (!below(slot, SLOTS, status, launch)) return;
kept[slot] = expert;
if (group_of(expert) == EXPERTS) return;
i64 own = 0, others = 0, before_it = 0;
bool spare = slot % K >= OWN;
for (i64 s = 0; s < SLOTS; ++s) {
    if (chosen[s] != expert) continue;
    bool other = s % K >= OWN;
    own += !other;
    others += other;
    before_it += other == spare && before(score[s], s, score[slot], slot);
}
i64 over = own % TILE, missing = TILE - over;
bool filled = over > 0 && missing <= over && missing <= others;
if (before_it >= (spare ? (filled ? missing : 0) : (filled ? own : own - over))) kept[slot] = NONE;
