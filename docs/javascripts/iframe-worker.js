// Browsers start no worker for a page that is opened as a file. The search of such a page runs in a frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.ready = new Promise((resolve) => {
        this.frame.onload = () => {
          const scope = this.frame.contentWindow
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = scope.document.createElement("script")
          script.src = url
          script.onload = () => resolve(scope)
          scope.document.body.append(script)
        }
      })
      document.body.append(this.frame)
    }

    async postMessage(data) {
      const scope = await this.ready
      scope.dispatchEvent(new scope.MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
