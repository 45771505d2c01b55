"""Where batches come from: the plan (which rows), and its readers.

The law, for users:

1. Data is a list of row groups: a parquet file's own, pieces of about 8 MiB of a CSV or JSON-lines file, single images.
2. `shuffle: false` keeps file order (files sorted by path). `shuffle: true` permutes the row groups and then shuffles rows in
   windows: `{window: 10000}` sets their rows, `auto` takes about 32 MiB, at least 8 global batches.
3. So a row moves with its row group, and then within its window. It is not a full shuffle: sorted data in large row groups
   stays partly sorted. Make row groups small, the window large, or write the files shuffled once. Images are fully permuted.
4. Global batch k of epoch e is a function of (data, batch.global_size, window, seed, e, k) and of nothing else: not of the
   number of workers, of crashes, or of what reads the data. Rank r trains one contiguous share of it.
5. Each row of an epoch is used once. A short last batch is a step of its own, weighted by its rows; `drop_last: true` leaves it
   out and says how many rows that is.
6. Resuming seeks: the start of any step is found without reading what lies before it, at any number of workers. The checkpoint
   keeps a fingerprint of the data (file names, sizes, rows, types) and of the order's settings; changed data is refused.
7. Transforms that keep the rows are called on any number of rows, so a row's result must not depend on its neighbours; one that
   takes `rng` gets exactly one global batch and a generator that depends on (seed, e, k). Transforms that change the number of
   rows (`rows: changes`) keep 4 and 5 for the rows they make, but resuming replays the epoch.
8. Evaluation scores every row once, in file order, each worker its own part.

Every rank may read for itself (`direct`: one process, torchrun, small data), or Ray Data reads each file once for all
(`ray_data`); both give the same batches.
"""
