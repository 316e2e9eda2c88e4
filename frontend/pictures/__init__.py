"""Pictures in chat. A frontend that gets no pictures imports nothing of this folder.

sources             reads a picture from a URL of the request: data, the web or a folder
fetch               reads pictures from the web, from hosts that the server allows
decoding            has a child process decode and resize pictures, because a hostile file may crash it
decode              decodes and resizes a picture in the child, with Pillow alone
grid                chooses how many tiles a picture is cut into, if its shape decides
recent              keeps decoded pictures, which the next turn of a chat sends again
prompt              puts the tokens of pictures into a prompt
"""
