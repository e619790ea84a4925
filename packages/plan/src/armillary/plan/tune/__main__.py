from torch.distributed.elastic.multiprocessing.errors import record

from armillary.plan.tune.cli import main

record(main)()  # writes an exception to the file in which torchrun looks for the cause of a failure
