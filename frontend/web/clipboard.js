// Copies text to the clipboard, and says whether it was copied.

const SAID_MS = 1500;

// Copies the text, and says on the button whether it was copied.
export async function copyBy(button, makeText) {
  const { textContent: name, ariaLabel: label } = button;
  if (/^(Copied|Could not copy)$/.test(name)) return;
  try {
    await copy(await makeText());
    button.textContent = "Copied";
  } catch {
    button.textContent = "Could not copy";
  }
  if (label !== null) button.ariaLabel = button.textContent;
  setTimeout(() => Object.assign(button, { textContent: name, ariaLabel: label }), SAID_MS);
}

// Browsers offer `navigator.clipboard` to https and localhost only; elsewhere `execCommand` still works.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.body.appendChild(document.createElement("textarea"));
  area.value = text;
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("no clipboard");
}
