"""`armillary-plan steps`: draws the steps of an attention method.

timeline.py     frames: the sends and blocks of each step, from the communication plan
cells.py        the mask as a square of cells, and the cells of a block
draw.py         a frame as SVG
page.py         an HTML page to step through the frames, or an SVG file with all of them
command.py      the command line
page.html, page.css, page.js   template of the HTML page
drawing.css                    styles of the drawings
"""
