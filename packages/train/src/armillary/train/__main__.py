from armillary.train.cli import main

main()
