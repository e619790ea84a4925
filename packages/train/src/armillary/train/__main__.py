from torch.distributed.elastic.multiprocessing.errors import record

from armillary.train.cli import main

record(main)()  # writes an error to the file in which torchrun looks for the root cause of a failure
