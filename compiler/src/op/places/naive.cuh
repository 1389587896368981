// pass decide: a row
places[at] = (INCLUSIVE ? z[at] >= 0.0f : z[at] > 0.0f) ? (int)(at % TOKENS) : -1;
// pass keep: an element of y
if (places[at / WIDTH] >= 0) y[at] = x[at];
else absent(y + at);
// pass keep_ints: an element of y
y[at] = places[at / WIDTH] >= 0 ? x[at] : OTHERWISE;
// pass numbers: an integer
y[at] = (float)x[at];
// pass runs: a token, whose run is the number of those that ended before it
int run = 0;
for (i64 i = at / TOKENS * TOKENS + 1; i <= at; ++i) {
    run += (BEGINS ? places[i] : places[i - 1]) >= 0 || documents[i] != documents[i - 1];
}
runs[at] = run;
// pass admit: a sequence, whose tokens follow one another
int *entries = cached + at * ENTRIES;
i64 next = 0;
while (next < ENTRIES && entries[next] >= 0) ++next;
for (i64 i = at * TOKENS; i < (at + 1) * TOKENS; ++i) {
    slots[i] = -1;
    if (places[i] < 0 || !below(next, ENTRIES, status, launch)) continue;
    entries[next] = positions[i];
    slots[i] = (int)next++;
}
