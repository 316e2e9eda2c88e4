// The calls of tools in an answer, and the boxes for what they gave.

export const copyOf = (id) => document.getElementById(id).content.cloneNode(true);

export class Calls {
  #form;
  #blocks = [];
  list = []; // as in a message: {id, type, function: {name, arguments}}

  constructor(form) {
    this.#form = form;
  }

  // Pieces as they come in a stream.
  take(pieces) {
    for (const { index, id, function: piece } of pieces) {
      if (!this.list[index]) this.#begin(index, id, piece.name);
      this.list[index].function.arguments += piece.arguments ?? "";
      this.#blocks[index].querySelector(".arguments").textContent = this.list[index].function.arguments;
    }
  }

  #begin(index, id, name) {
    this.list[index] = { id, type: "function", function: { name, arguments: "" } };
    const fresh = copyOf("call");
    this.#blocks[index] = fresh.querySelector(".call");
    fresh.querySelector(".name").textContent = name;
    this.#form.append(fresh);
    this.#form.hidden = false;
  }

  // Asks for the results; `give(messages)` gets them.
  offer(give) {
    const fields = this.#blocks.map((block) => block.querySelector("textarea"));
    for (const block of this.#blocks) block.querySelector(".result").hidden = false;
    const button = document.createElement("button");
    button.textContent = fields.length > 1 ? "Go on with these results" : "Go on with this result";
    this.#form.append(button);
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      give(fields.map((field, i) => ({ role: "tool", tool_call_id: this.list[i].id, content: field.value })));
    });
  }
}

// The conversation has gone on: what was not given can be given no more.
export function closeCalls(log) {
  for (const field of log.querySelectorAll(".calls textarea")) field.readOnly = true;
  for (const button of log.querySelectorAll(".calls button")) button.remove();
}
