// pass embed: an element of x
int id = ids[at / WIDTH];
if (below(id, VOCAB, status, launch)) x[at] = number(table, id * WIDTH + at % WIDTH);
// pass grad: an element of the table
float sum = 0.0f;
for (i64 row = 0; row < ROWS; ++row) {
    int id = ids[row];
    if (below(id, VOCAB, status, launch) && id == at / WIDTH) sum += d[row * WIDTH + at % WIDTH];
}
table[at] = ACCUMULATE ? table[at] + sum : sum;
