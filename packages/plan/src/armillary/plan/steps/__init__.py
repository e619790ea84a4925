"""Steps of an attention method as pictures; `armillary-plan steps`.

timeline.py     frames: the sends and blocks of each step, from the communication plan
cells.py        the mask as cells, and the cells of a block
draw.py         a frame as SVG
page.py         an HTML page to step through, or an SVG file with all frames
command.py      arguments
page.html, page.css, page.js   the page's template
"""
