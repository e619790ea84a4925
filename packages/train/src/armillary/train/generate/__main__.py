from torch.distributed.elastic.multiprocessing.errors import record

from armillary.train.generate.cli import main

record(main)()  # an error goes where torchrun looks for the cause of a failure
